"""Commands that compare and tune."""
