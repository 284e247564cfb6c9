"""Images in prompts: decoding, the tower that computes their rows, and the image ids in a prompt.

Only `tensors` imports torch. Pillow is imported with the first image.
"""
