"""Decision heads of the kind "jev": a linear over the last hidden state, whose rows score options."""
