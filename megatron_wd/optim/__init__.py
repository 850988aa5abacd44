"""Weight decay, AdamW, schedules, and building Megatron Core's optimizer."""
