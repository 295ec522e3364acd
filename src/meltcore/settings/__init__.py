"""The settings of a server and of a fleet: structs, their YAML, checks and flags, and templates of other servers."""
