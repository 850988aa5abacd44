"""Models between Megatron's checkpoints and Hugging Face folders, one tensor at a time.

Nothing that is read here is executed: a checkpoint or a model folder of a stranger is data.
"""
