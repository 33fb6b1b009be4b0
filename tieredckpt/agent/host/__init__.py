"""What an agent is on its host: process, sockets, runtime folder, sessions."""
