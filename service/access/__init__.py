"""Who may call (`caller`, `keys`), and how much of a replica one caller may take (`quota`)."""
