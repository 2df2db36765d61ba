"""What is computed and what is compiled, as data: standard library only."""
