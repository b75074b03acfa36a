"""Pictures of plans and schedules, pages about them, and the presenter of facts."""
