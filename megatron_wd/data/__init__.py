"""Tokenizers, corpus readers, tokenizing to Megatron's .bin/.idx, and datasets. Importing it is
cheap.
"""
