"""What runs on the GPU, in a process of its own: the only modules of this half that import torch.

`python -m meltcore.hardware.probes NAME` reads one Job from its standard input and writes an Answer a line. Nothing
else imports these modules, so a probe that hangs in the driver hangs alone and can be killed.
"""
