"""What endpoints take and give: schemas, their checks, and the errors that they become."""
