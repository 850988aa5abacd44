"""Models on Megatron Core: one file per family, the layers they share, building them."""
