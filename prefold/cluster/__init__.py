"""Many replicas as one: who gets which work. No torch, and no I/O where a module does not say so."""
