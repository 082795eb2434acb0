"""What several of the scripts use; it imports none of them."""
