"""From records on disk to batches on devices. Only this folder imports TensorFlow."""
