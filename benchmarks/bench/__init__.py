"""All contenders in one run, on the same checkpoints, prompts, token counts and cores: `make bench`."""
