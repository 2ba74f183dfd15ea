"""Classes of reward models that SGLang lacks, or loads wrongly.

SGLang loads them where ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names this package. A module holds one or
more classes by the names that checkpoints have under ``architectures``, listed in ``EntryClass``;
``plugin_protocol.REWARD_CLASSES`` has their names for the code that starts servers.
"""
