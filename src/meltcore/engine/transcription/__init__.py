"""The transcription engine and its device loops: CTC and RNN-T."""
