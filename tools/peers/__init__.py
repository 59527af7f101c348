"""Other runtimes beside ours in a bench, each in a process of its own."""
