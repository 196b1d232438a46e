"""Generated geometry problems: seeded, exact, drawn to scale, no two alike."""
