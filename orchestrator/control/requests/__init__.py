"""What happens to requests: admission, dispatch, streams, worker events, replay."""
