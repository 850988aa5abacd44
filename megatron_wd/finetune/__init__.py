"""Fine-tuning of Hugging Face folders with TRL: tasks as YAML, exact resume, grids. Importing it is cheap."""
