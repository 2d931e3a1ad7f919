"""Results of this repository that anyone can replay: rows (*.toml), and the program that fills them."""
