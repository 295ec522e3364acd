"""Operations on a running fleet, at its admin socket."""
