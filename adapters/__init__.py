"""Learn on the device: the LoRA weights of the drafter and how they are stored."""
