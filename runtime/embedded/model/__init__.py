"""The forward pass: a checkpoint's weights, and arithmetic that is the same bits in any batch."""
