"""The room of images: decoded pixels, the tower that makes rows of them, and what a prompt has in their place.

Only `tensors` imports torch. Pillow is imported with the first image.
"""
