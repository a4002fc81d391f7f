"""What a GPT run is made of: its datasets, its forward step, its configuration; all of it Megatron's own parts."""
