"""From flags to a plan: validated options, the prepared model, each owner's share."""
