"""The handling of requests: admission, dispatch, response streams, worker events, replay."""
