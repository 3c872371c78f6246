"""fingerprint: sees every changed bit of the weights in memory, names it and knows the way back."""
