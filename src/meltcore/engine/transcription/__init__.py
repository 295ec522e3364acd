"""Transcribes speech: the engine, and the loops on the device for CTC and RNN-T."""
