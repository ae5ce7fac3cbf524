"""Policy versions: trainers publish them, samplers load them."""
