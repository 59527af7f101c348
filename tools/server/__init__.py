"""The OpenAI API over a bundle: see docs/server.md."""
