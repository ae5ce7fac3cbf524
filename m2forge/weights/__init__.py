"""Policy versions, published by who trains and taken by who samples."""
