"""What a start needs: which programs to compile, and where compiled ones are kept."""
