"""What requests of all tasks share: the choice of a model, and the exchange of one request."""
