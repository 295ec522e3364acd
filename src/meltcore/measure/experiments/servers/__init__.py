"""How experiments start servers, wait for them, ask them and end them."""
