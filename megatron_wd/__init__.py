"""megatron_wd: pretraining and fine-tuning studies of weight decay on Megatron Core."""

__version__ = "0.1.0"
