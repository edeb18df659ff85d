"""Decision files: those shipped for known hosts, and the commands over any."""
