"""The SGLang engine: policy and reward model on SGLang servers, over HTTP."""
