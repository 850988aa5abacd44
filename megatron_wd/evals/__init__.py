"""What a finished model can do: text from it, and later its scores."""
