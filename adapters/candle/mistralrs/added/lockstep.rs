//! Keeps the engines of all ranks in step: in each round of its loop an engine handles the requests that rank 0 handles
//! in that round, so all ranks run the same sequences in the same batches.
//!
//! edit.py adds this file to mistralrs-core. Rank 0 writes a line with a round's requests to the standard input of each
//! daemon. The end of the input ends the daemon.

use std::collections::VecDeque;
use std::io::Write;
use std::process::{Child, ChildStdin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex;

use tokio::sync::mpsc::{channel, error::TryRecvError, Receiver, Sender};

use crate::distributed::is_daemon;
use crate::engine::TERMINATE_ALL_NEXT_STEP;
use crate::Request;

struct Rounds {
    daemons: Vec<ChildStdin>,
    /// The request that ended rank 0's wait.
    first: Option<Request>,
    /// Requests of this round that are still to handle, once they are exchanged.
    round: Option<VecDeque<Request>>,
}

static ROUNDS: Mutex<Rounds> = Mutex::new(Rounds { daemons: Vec::new(), first: None, round: None });
static STARTED: AtomicBool = AtomicBool::new(false);

pub(crate) fn active() -> bool {
    mistralrs_quant::distributed::external::active().is_some()
}

/// Takes over the daemons that rank 0 started. One that ends before all ranks are connected ends the server, which
/// would wait for it otherwise. Later a collective fails, and its error is the answer to clients.
pub(crate) fn lead(daemons: Vec<Child>) {
    for (index, mut daemon) in daemons.into_iter().enumerate() {
        ROUNDS.lock().unwrap().daemons.extend(daemon.stdin.take());
        std::thread::spawn(move || {
            let status = daemon.wait();
            tracing::error!("rank {} (process {}) has ended: {status:?}", index + 1, daemon.id());
            if !STARTED.load(Ordering::SeqCst) {
                std::process::exit(1);
            }
        });
    }
}

/// Notes that all ranks are connected.
pub(crate) fn started() {
    STARTED.store(true, Ordering::SeqCst);
}

/// Waits until there is something to do. Returns whether the engine goes on.
pub(crate) async fn wait(requests: &tokio::sync::Mutex<Receiver<Request>>) -> bool {
    if is_daemon() {
        return true;
    }
    let request = requests.lock().await.recv().await;
    let goes_on = request.is_some();
    ROUNDS.lock().unwrap().first = request;
    goes_on
}

/// Returns the next request of this round, or `Empty` at its end.
pub(crate) fn next(requests: &mut Receiver<Request>) -> Result<Request, TryRecvError> {
    if !active() {
        return requests.try_recv();
    }
    let mut rounds = ROUNDS.lock().unwrap();
    if rounds.round.is_none() {
        rounds.round = Some(if is_daemon() { receive() } else { rounds.send(requests) });
    }
    let request = rounds.round.as_mut().and_then(VecDeque::pop_front);
    if request.is_none() {
        rounds.round = None;
    }
    request.ok_or(TryRecvError::Empty)
}

impl Rounds {
    fn send(&mut self, requests: &mut Receiver<Request>) -> VecDeque<Request> {
        let mut round: VecDeque<Request> = self.first.take().into_iter().collect();
        while let Ok(request) = requests.try_recv() {
            round.push_back(request);
        }
        if TERMINATE_ALL_NEXT_STEP.load(Ordering::SeqCst) {
            round.push_back(Request::TerminateAllSeqsNextStep);
        }
        let line = serde_json::to_string(&round).expect("requests are serialisable") + "\n";
        // A daemon that has ended is reported by the next collective, which names it.
        self.daemons
            .iter_mut()
            .for_each(|daemon| _ = daemon.write_all(line.as_bytes()).and_then(|()| daemon.flush()));
        round
    }
}

fn receive() -> VecDeque<Request> {
    let mut line = String::new();
    match std::io::stdin().read_line(&mut line).map(|_| serde_json::from_str::<VecDeque<Request>>(&line)) {
        Ok(Ok(mut round)) => {
            round.iter_mut().for_each(discard_responses);
            round
        }
        // Rank 0 has ended.
        _ if line.is_empty() => std::process::exit(0),
        other => {
            tracing::error!(
                "requests of rank 0 that this rank cannot read: {:?}",
                other.map(|round| round.err())
            );
            std::process::exit(1)
        }
    }
}

/// Gives a request a channel for its responses, which rank 0 sends to the client.
fn discard_responses(request: &mut Request) {
    fn sink<T: Send + 'static>() -> Sender<T> {
        let (sender, mut receiver) = channel(16);
        tokio::spawn(async move { while receiver.recv().await.is_some() {} });
        sender
    }
    match request {
        Request::Normal(request) => request.response = sink(),
        Request::Tokenize(request) => request.response = sink(),
        Request::Detokenize(request) => request.response = sink(),
        Request::ReIsq(_) | Request::Terminate | Request::TerminateAllSeqsNextStep => (),
    }
}
