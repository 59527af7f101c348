"""`omnidraft train-drafter`: text from a target, a tokenizer, distillation, validation by acceptance rate."""
