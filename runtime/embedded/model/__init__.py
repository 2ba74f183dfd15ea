"""The forward pass: a checkpoint's weights, and arithmetic with the same bits in any batch."""
