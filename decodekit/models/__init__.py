"""Where models come from: directories, the hub and its cache, and packages that carry weights."""
