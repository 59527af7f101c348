"""The omnidraft command, one module per verb."""
