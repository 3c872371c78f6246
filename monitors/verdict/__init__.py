"""One verdict on a server from all evidence.  `evidence` asks, `table` decides, `join` tells."""
