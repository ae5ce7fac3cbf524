"""The loop: agents act through the gateway, the pool orders, the trainer learns, weights go back."""
