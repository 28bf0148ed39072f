"""What happens to images and labels on the device."""
