"""What configuration files say: fields, tasks, quantization. No torch."""
