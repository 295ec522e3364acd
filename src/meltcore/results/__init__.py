"""Result documents: their schema, how they are read, written and converted, and their numbers in words."""
