"""Models that are not loaded: folders on disk, the hub, downloads, and which machine they fit."""
