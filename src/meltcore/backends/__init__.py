"""What the API talks to: engines in processes of this machine."""
