"""Result documents: their schema and run folders."""
